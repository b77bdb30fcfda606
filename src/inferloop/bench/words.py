"""Common English words to make prompts of. Which of them are one token is asked of the target's tokenizer."""

from __future__ import annotations

_TEXT = """
    about above act add after again age air all along also always among animal answer any are area arm army around
    art ask away baby back bad bag ball bank base be bear bed before begin behind being best better between big bird
    black blood blue board body book both box boy bring brother brown build burn bus business but buy call came can
    car card care carry case cat catch cause cell center chair chance change check child choice church circle city
    class clear close cloth cloud coast cold color come common company cook cool copy corn cost could count country
    course court cover cross crowd current cut dance dark date day dead deal death deep design did die direct do
    doctor dog door double down draw dream dress drink drive drop dry during each ear early earth east eat edge egg
    eight else end energy engine enough enter even event ever every eye face fact fall family far farm fast father
    fear feed feel feet few field fight figure fill final find fine finger fire first fish five flat floor flow
    follow food foot for force form forward four free fresh friend from front full fun game garden gas gave general
    get girl give glass go gold gone good got government grand grass gray great green ground group grow guess hair
    half hall hand happy hard has hat have he head hear heart heat heavy help her here high hill him his history hit
    hold hole home hope horse hot hotel hour house how huge human hundred hunt ice idea if image in inch island it
    job join jump just keep key kill kind king knew know lady lake land language large last late laugh law lay lead
    learn least leave left leg less let letter level life lift light like line list listen little live local long
    look lost lot love low machine made main make man many map mark market master match matter may me mean measure
    meat meet men metal method middle might mile milk mind minute miss model modern moment money month moon more
    morning most mother motion mountain mouth move much music must my name nation natural nature near neck need
    never new news next night nine no noise north nose note nothing notice now number object ocean of off offer
    office often oil old on once one only open or order other our out over own page pain paint pair paper parent
    part party pass past path pattern pay people period person phone picture piece place plan plane plant play point
    poor port pose position post pound power present press price print problem process produce product proper
    property provide public pull push put queen question quick quiet race radio rain raise ran range rate reach read
    ready real reason record red region report rest result return rich ride right ring rise river road rock role
    roll room root rope rose round row rule run safe said sail salt same sand sat save saw say school science sea
    search season seat second section see seed seem self sell send sense sent series serve set seven several shape
    share sharp she sheet ship shop short should shoulder show side sign silver simple since sing single sister sit
    six size skill skin sky sleep slow small smell smile snow so social soft soil soldier some son song soon sort
    sound south space speak special speed spell spend spot spread spring square stage stand star start state station
    stay steel step stick still stone stood stop store story straight strange stream street strong student study
    such sugar suit summer sun support sure surface sweet swim system table tail take talk tall teach team tell ten
    term test than that the their them then there these they thick thin thing think third this those though thought
    thousand three through time tiny to together told tone too took tool top total touch toward town track trade
    train travel tree trip true try turn twenty two type under unit until up us use usual valley value very view
    village visit voice wait walk wall want war warm was wash watch water wave way we wear weather week weight well
    went were west what wheel when where which while white who whole why wide wife wild will win wind window wing
    winter wire wish with woman wonder wood word work world would write wrong yard year yellow yes yet you young
    your
"""

WORDS = tuple(_TEXT.split())
